"""Where Lightning's own ways are met; its private API is used here alone."""
