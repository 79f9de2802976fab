"""Number formats of the student's and the teacher's matrix products."""
