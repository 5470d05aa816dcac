"""Facts about ATen ops: schemas, traits and functional forms."""
