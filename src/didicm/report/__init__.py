"""What stored results show: tables, verdict, figures, report."""
