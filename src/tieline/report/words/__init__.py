"""Sentences of results, one module per result, and one formatter per quantity.

    numbers       shares, numbers, durations, intervals and lists
    inspection    verdict, findings and notes of an inspection
    diff          verdict, findings and evidence of a comparison
    audit         verdict, notes and remedies of a precision audit
    smooth        verdict and facts of a smoothed model
    check         verdict and findings of a check of routes
    serve_check   verdict, near-ties and advice of a check of a running server

Analyses return verdicts as data; nothing outside this package writes sentences about results.
"""
