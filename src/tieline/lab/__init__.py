"""The laboratory: theory and claims of the five papers; exact where possible, may be slow.

geometry, limits, tropical, estimation, attention   the theory of each paper, as functions
training                                            recipes that train models with every gate
claims                                              each statement of the papers with its verdict
on_model                                            the questions of the papers put to a given model
commands, report                                    the lab's commands and pages

The instrument imports none of it; `tieline.lab.plugin` registers what the command line shows.
"""
