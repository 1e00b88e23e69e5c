"""The generator of the raw binding layers: a model of the header, and one emitter per language."""
