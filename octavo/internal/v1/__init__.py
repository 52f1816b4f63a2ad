"""Generated from protos/octavo/internal/v1 by `make generate`; do not edit."""
