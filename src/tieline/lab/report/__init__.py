"""Pages, figures and tables of the results of the laboratory."""
