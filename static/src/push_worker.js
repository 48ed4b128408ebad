// Service worker: shows push messages while no page of Fairway is open. It has no other part in the portal.
self.addEventListener("push", (event) => {
  const data = event.data.json();
  event.waitUntil(self.registration.showNotification(data.title, { body: data.message, tag: data.id, data: data.url }));
});

self.addEventListener("notificationclick", (event) => {
  event.notification.close();
  event.waitUntil(self.clients.openWindow(event.notification.data));
});
