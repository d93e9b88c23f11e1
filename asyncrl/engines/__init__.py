"""Engines that generate tokens, the trainer that makes weights, and the cluster that they run on."""
