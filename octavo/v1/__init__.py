"""Generated from protos/octavo/v1 by `make generate`; do not edit."""
