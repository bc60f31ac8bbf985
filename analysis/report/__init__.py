"""One self-contained HTML page of a dump: tables, figures, findings and the token viewer."""
