"""What is known of a request: ids, parameters, limits, errors, and the record of its sequence."""
