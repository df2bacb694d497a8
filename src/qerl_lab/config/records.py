"""Names of the JSON records that commands leave in the model directories they write.

A command recognises its own output by its record, and `overwrite=true` replaces nothing else. So a copy of a model must
not carry the record of the original.
"""

WARMUP = "warmup.json"  # how a warm-up trained the model, and its results
QUALITY = "quality.json"  # how a checkpoint was quantized, and the resulting errors
EXPORT = "export.json"  # which run was exported, and where its base model came from
RECIPE = "recipe.json"  # how the embedded policy was trained
UNPACKED = "gguf.json"  # from which GGUF file the model was unpacked
METHODS = ("rtn", "awq", "gptq")  # quantization methods as quality.json names them
RECORDS = (WARMUP, QUALITY, EXPORT, RECIPE, UNPACKED)
