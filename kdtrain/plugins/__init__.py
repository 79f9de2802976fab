"""Plugins that come with kdtrain: each is a folder that registers as a stranger's package does, and can be deleted."""
