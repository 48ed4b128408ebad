"use strict";
SwaggerUIBundle({
  url: "{{ schema|escapejs }}",
  dom_id: "#api",
  presets: [SwaggerUIBundle.presets.apis],
  layout: "BaseLayout",
  deepLinking: false,
  filter: true,
  // with 130 operations or more the page draws only the first few of them: sections open on click
  docExpansion: "none",
  tryItOutEnabled: true,
  requestInterceptor(request) {
    if (!["GET", "HEAD", undefined].includes(request.method)) {
      request.headers["X-CSRFToken"] = "{{ csrf_token|escapejs }}";
    }
    return request;
  },
});
