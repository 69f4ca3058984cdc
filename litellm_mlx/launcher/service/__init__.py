"""`litellm-mlx service`: the servers at login, and again when they fail."""
