"""An offline dataset and what comes in, sampled together."""
