"""Latent attention (MLA): one vector for each token and layer, from which all heads have their keys and values."""
