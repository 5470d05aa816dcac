"""Parts of torch that are traced in a form of their own."""
