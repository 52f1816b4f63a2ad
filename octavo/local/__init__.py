"""What only `octavo up` uses: a store, certificates and processes on one machine."""
