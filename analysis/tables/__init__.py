"""Tables: one question asked of the tokens outside in several ways."""
