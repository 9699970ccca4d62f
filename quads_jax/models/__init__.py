"""One config-driven decoder; a model family is a preset and small options of `ModelConfig`."""
