"""What the commands do, one module a kind; `deltad.cli` is the roof over them."""
