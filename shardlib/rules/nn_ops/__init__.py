"""Rules of ops of neural networks and of linear algebra."""
