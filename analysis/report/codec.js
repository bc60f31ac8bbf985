/* What the page was given: a header of plain objects and columns of numbers.
 *
 * A column is base64 of deflated bytes, all first bytes of its numbers before all second ones.
 */

const TYPED = { Float64Array, Float32Array, Int32Array, Uint16Array, Uint8Array };
const UNKNOWN = 65535;
const LITTLE = new Uint8Array(new Uint16Array([1]).buffer)[0] === 1;

function readHeader() {
  return JSON.parse(document.getElementById("deltad-header").textContent);
}

async function readColumns(header) {
  const columns = {};
  const names = Object.keys(header.columns);
  await Promise.all(
    names.map(async (name) => {
      const holder = document.getElementById(`column-${name}`);
      const planes = await inflate(bytesOf(holder.textContent));
      holder.remove(); // its text is of no more use
      columns[name] = joined(planes, header.columns[name]);
    }),
  );
  return columns;
}

function bytesOf(text) {
  return Uint8Array.fromBase64?.(text) ?? Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
}

async function inflate(bytes) {
  if (typeof DecompressionStream === "undefined")
    throw new Error("this browser is too old: it has no DecompressionStream");
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function joined(planes, { type, length }) {
  const size = TYPED[type].BYTES_PER_ELEMENT;
  if (planes.length !== size * length) throw new Error("a column of the page is damaged");
  if (size === 1) return planes;
  const bytes = new Uint8Array(planes.length);
  for (let plane = 0; plane < size; plane++) {
    const place = LITTLE ? plane : size - 1 - plane;
    const from = plane * length;
    for (let i = 0; i < length; i++) bytes[i * size + place] = planes[from + i];
  }
  return new TYPED[type](bytes.buffer);
}
