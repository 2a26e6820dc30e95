"""Sentences of results, one module per result, and one formatter per quantity.

    numbers            shares, numbers, durations, intervals and lists
    inspect            verdict, findings and notes of an inspection
    diff               verdict, findings and evidence of a comparison
    audit              verdict, notes and remedies of a precision audit
    smooth             verdict and facts of a smoothed model
    check              verdict and findings of a check of files of routes
    serve_check        verdict and notes of a check of a running server
    served_precision   what a precision does to a served model, and what to do

Analyses return verdicts as data; nothing outside this package writes sentences about results.
"""
