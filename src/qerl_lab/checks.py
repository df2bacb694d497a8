"""What may be typed: the schema's keys and types by dotted name, and the messages for what does not fit them."""

from typing import Any, get_args, get_type_hints

from qerl_lab.config import ConfigError, RunConfig, did_you_mean, leaves

# How a message names a type, and an example for a key whose default is null or empty.
TYPE_WORDS: dict[Any, tuple[str, Any]] = {
    str: ("text", "NAME"),
    int: ("a whole number", 1),
    float: ("a number", 1.0),
    bool: ("true or false", True),
    list[str]: ("a list of names", ["q_proj", "v_proj"]),
}


def schema() -> dict[str, Any]:
    """Every key of a configuration by its dotted name, with its type."""
    found = {}
    for name, _, _ in leaves(RunConfig()):
        kind: Any = RunConfig
        for part in name.split("."):
            kind = get_type_hints(kind)[part]
        found[name] = kind
    return found


def check_key(name: str) -> Any:
    """The type of a key; ConfigError with the closest known keys, else with what stands at that place."""
    known = schema()
    if name in known:
        return known[name]
    inside = [key for key in known if key.startswith(name + ".")]
    if inside:
        raise ConfigError(f"{name} is a node, not a key. Allowed: {', '.join(inside)}.")
    node, _, last = name.rpartition(".")
    here = [key for key in known if key.startswith(node + ".")] or list({key.split(".")[0]: None for key in known})
    elsewhere = [key for key in known if key.rpartition(".")[2] == last]
    hint = f" Did you mean {' or '.join(elsewhere)}?" if elsewhere else did_you_mean(name, [*here, *known])
    raise ConfigError(f"{name} is not a known key.{hint} Allowed: {', '.join(here)}.")


def check_type(name: str, kind: Any, value: Any) -> None:
    """ConfigError unless `value` has the key's type; a whole number serves as a number too."""
    if _has_type(value, kind):
        return
    default = {key: value for key, _, value in leaves(RunConfig())}[name]
    raise ConfigError(wrong_type(name, kind, value, default))


def wrong_type(name: str, kind: Any, value: Any, default: Any) -> str:
    """The message for a value of another type than `kind`; its example is the default, unless that is empty."""
    example = TYPE_WORDS[_without_null(kind)][1] if default in (None, "", []) else default
    return (
        f"{name}={typed(value)} is not allowed; allowed: {type_words(kind)}. Type for example {name}={typed(example)}."
    )


def type_words(kind: Any) -> str:
    """A type in words."""
    return TYPE_WORDS[_without_null(kind)][0] + (" or null" if type(None) in get_args(kind) else "")


def _without_null(kind: Any) -> Any:
    return get_args(kind)[0] if type(None) in get_args(kind) else kind


def _has_type(value: Any, kind: Any) -> bool:
    if value is None:
        return type(None) in get_args(kind)
    kind = _without_null(kind)
    if kind == list[str]:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    return type(value) is kind or (kind is float and type(value) is int)


def check_types(values: dict[str, Any], prefix: str = "") -> None:
    """`check_key` and `check_type` over plain nested values, e.g. of a resolved.yaml that somebody edited."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            check_types(value, name + ".")
        else:
            check_type(name, check_key(name), value)


def typed(value: Any) -> str:
    """A value as one types it on the command line."""
    if isinstance(value, list):
        return f"[{','.join(typed(item) for item in value)}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) or "''"
