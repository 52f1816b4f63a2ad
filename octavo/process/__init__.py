"""What a process needs of its machine: children, cores, memory, addresses, an event loop, logs."""
