"""What stands between two marks in an output: the calls of tools, as families of models write them."""
