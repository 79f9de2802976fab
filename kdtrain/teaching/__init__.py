"""What a teacher is, and the kinds that come with kdtrain."""
