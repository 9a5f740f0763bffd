"""`featcal report`: differences, figures and pages of runs, comparisons and diagnoses."""
