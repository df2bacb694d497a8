"""From a run to what other libraries load: a PEFT adapter, or a merged model, with a model card."""
