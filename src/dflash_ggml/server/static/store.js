// Where conversations are kept: IndexedDB, or memory where the browser has none to give. Small values: localStorage.

const NAME = "dflash", VERSION = 1;

function settled(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function finished(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

/** Heads ({id, title, updated}) for the list, bodies (whole conversations) for the one that is open. */
class Database {
  constructor(db) {
    this.db = db;
    this.lasting = true;
  }

  heads() {
    return settled(this.db.transaction("heads").objectStore("heads").getAll());
  }

  get(id) {
    return settled(this.db.transaction("bodies").objectStore("bodies").get(id));
  }

  put(body) {
    const both = this.db.transaction(["heads", "bodies"], "readwrite");
    both.objectStore("heads").put({ id: body.id, title: body.title, updated: body.updated });
    both.objectStore("bodies").put(body);
    return finished(both);
  }

  remove(id) {
    const both = this.db.transaction(["heads", "bodies"], "readwrite");
    both.objectStore("heads").delete(id);
    both.objectStore("bodies").delete(id);
    return finished(both);
  }
}

/** The same for as long as the page is open. */
class Memory {
  constructor() {
    this.bodies = new Map();
    this.lasting = false;
  }

  async heads() {
    return [...this.bodies.values()].map(({ id, title, updated }) => ({ id, title, updated }));
  }

  async get(id) {
    return structuredClone(this.bodies.get(id));
  }

  async put(body) {
    this.bodies.set(body.id, structuredClone(body));
  }

  async remove(id) {
    this.bodies.delete(id);
  }
}

export async function openStore() {
  try {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("heads", { keyPath: "id" });
      request.result.createObjectStore("bodies", { keyPath: "id" });
    };
    return new Database(await settled(request));
  } catch {
    return new Memory();
  }
}

/** A value kept by `remember`; "" without one, or where the browser keeps nothing for this page. */
export function recall(name) {
  try {
    return localStorage.getItem(name) ?? "";
  } catch {
    return "";
  }
}

export function remember(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch { /* kept as long as the page is open */ }
}
