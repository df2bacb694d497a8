"""What the lab's commands note of a model, in the directory that they wrote it to.

By its record a command knows what it made, and what `overwrite=true` may remove. So no copy of a model has that of its
source.
"""

WARMUP = "warmup.json"  # what was taught, and how it went
QUALITY = "quality.json"  # how a checkpoint was quantized, and what that cost
EXPORT = "export.json"  # which run it was, and the origin of its base
RECIPE = "recipe.json"  # how the embedded policy was trained
UNPACKED = "gguf.json"  # which file was unpacked
METHODS = ("rtn", "awq", "gptq")  # of the quantize command, as quality.json has them
RECORDS = (WARMUP, QUALITY, EXPORT, RECIPE, UNPACKED)
