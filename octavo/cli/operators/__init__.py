"""What operators ask: `octavo status`, `show`, `drain` and `migrate`."""
