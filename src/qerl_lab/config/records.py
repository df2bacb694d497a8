"""Names of the JSON records that commands leave in the model directories they write.

A command recognises its own output by the record, which is what `overwrite=true` may replace. A copy of a model must
therefore not carry its source's record.
"""

WARMUP = "warmup.json"  # how a warm-up trained it, with results
QUALITY = "quality.json"  # how a checkpoint was quantized, and the resulting errors
EXPORT = "export.json"  # the exported run, and the origin of its base model
RECIPE = "recipe.json"  # how the embedded policy was trained
UNPACKED = "gguf.json"  # the GGUF file it was unpacked from
METHODS = ("rtn", "awq", "gptq")  # quantization methods as quality.json names them
RECORDS = (WARMUP, QUALITY, EXPORT, RECIPE, UNPACKED)
