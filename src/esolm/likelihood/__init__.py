"""Likelihood: one engine that weighs orders, the estimators that read its log-weights, and scoring of whole texts.

Owns p(x) = E_sigma[p(x | sigma)] and its bounds, the jackknife, standard errors, and the work file that resumes a long
scoring run. Imports core, runtime, net, systems and data.
"""
