"""What a traced function may not do, or does beside returning, found out and said in words."""
