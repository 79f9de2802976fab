"""The overture of a run: its data, its recipe, its folder, and what is built from them."""
