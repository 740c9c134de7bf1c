"""An offline dataset and online experience, sampled together."""
