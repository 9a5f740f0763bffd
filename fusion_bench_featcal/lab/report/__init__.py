"""`featcal report`: differences, figures and pages of runs, comparisons, studies and diagnoses."""
