"""Training: `RunConfig`, `Trainer`, the run folder, the averaged weights, parallelism and the cost model.

May import core, runtime, net, sampling, systems, data, likelihood and storage.
"""
