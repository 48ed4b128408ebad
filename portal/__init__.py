"""The portal: users, projects, quotas and jobs, with pages, REST, WebSockets and the gateway."""
