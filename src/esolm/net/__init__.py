"""The network: its protocol, the trainable transformer, attention kernels, the KV cache, the output layer, packing of
several inputs into one pass, folding for inference, and CUDA graphs. May import `core` and `runtime`.
"""
