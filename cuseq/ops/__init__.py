"""One module an operator family; in each a call becomes problem -> plan -> launch."""
