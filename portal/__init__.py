"""The portal remembers and serves: the record of users, projects, quotas and jobs, and every door to it."""
