"use strict";
SwaggerUIBundle({
  url: "{{ schema|escapejs }}",
  dom_id: "#api",
  presets: [SwaggerUIBundle.presets.apis],
  layout: "BaseLayout",
  deepLinking: false,
  filter: true,
  tryItOutEnabled: true,
  requestInterceptor(request) {
    if (!["GET", "HEAD", undefined].includes(request.method)) {
      request.headers["X-CSRFToken"] = "{{ csrf_token|escapejs }}";
    }
    return request;
  },
});
