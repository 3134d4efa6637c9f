"""What people type: `ullim COMMAND`."""
