"""A virtual clock and modelled engines around the real scheduler: what a setting gives, before any GPU is rented."""
