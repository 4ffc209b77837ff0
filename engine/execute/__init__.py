"""What a step computes: weights, layers, kernels, sampling."""
