// Text files that go with a question.

const LARGEST = 512 << 10; // bytes of one file
const ALL = 2 << 20; // bytes of all files of a message

export function sizeText(bytes) {
  return bytes < 1024 ? `${bytes} B` : `${(bytes / 1024).toFixed(bytes < 10240 ? 1 : 0)} KiB`;
}

/** Reads `files` beside those in `held`; returns {files, problems}: what could be read, and a sentence for each of the rest. */
export async function readFiles(files, held) {
  const out = [], problems = [];
  let total = held.reduce((sum, file) => sum + file.size, 0);
  for (const file of files) {
    if (file.size > LARGEST) problems.push(`${file.name} is larger than ${sizeText(LARGEST)}`);
    else if (total + file.size > ALL) problems.push(`${file.name}: all files together would exceed ${sizeText(ALL)}`);
    else {
      const text = await readText(file);
      if (text === null) problems.push(`${file.name} is not a text file in UTF-8`);
      else {
        out.push({ name: file.name, size: file.size, text });
        total += file.size;
      }
    }
  }
  return { files: out, problems };
}

async function readText(file) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? null : text.replace(/\r\n?/g, "\n");
  } catch {
    return null;
  }
}
