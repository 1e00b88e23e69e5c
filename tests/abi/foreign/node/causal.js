// Node through koffi: structures and prototypes from the header's text, the case `causal` of
// tests/data.  node causal.js LIBRARY HEADER FOLDER
'use strict';
const fs = require('fs');
const path = require('path');
const koffi = require('koffi');

const [libraryPath, headerPath, folder] = process.argv.slice(2);

// ---- the header

const block = fs.readFileSync(headerPath, 'utf8')
  .split('declarations begin')[1].split('declarations end')[0]
  .replace(/^[^]*?\*\//, '').replace(/\/\*[^]*?(\*\/|$)/g, '');

const structs = {};
for (const [, name, body] of block.matchAll(/typedef struct (\w+) \{([^]*?)\} \1;/g)) {
  const fields = {};
  for (const [, type, field, length] of body.matchAll(/(\w[\w \n*]*?)(\w+)(?:\[(\d+)\])?;/g)) {
    const base = type.replace(/const/g, '').trim();
    const isPointer = type.includes('*') || base.endsWith('_fn');
    const kind = isPointer ? 'void *' : structs[base] ?? base;
    fields[field] = length ? koffi.array(kind, Number(length)) : kind;
  }
  structs[name] = koffi.struct(name, fields);
}
koffi.opaque('flashattn_plan');

const library = koffi.load(libraryPath);
function declare(name, outputs = []) {
  let prototype = block.match(new RegExp(`FLASHATTN_API ([^;]*\\b${name}\\([^;]*\\));`))[1];
  for (const parameter of outputs) {
    prototype = prototype.replace(new RegExp(`(\\w+ \\**${parameter}\\b)`), '_Out_ $1');
  }
  return library.func(prototype.replace(/\s+/g, ' '));
}
const argsInit = declare('flashattn_args_init', ['args']);
const planCreate = declare('flashattn_plan_create', ['plan']);
const planDestroy = declare('flashattn_plan_destroy');
const workspaceSize = declare('flashattn_workspace_size', ['bytes']);
const forward = declare('flashattn_forward');
const lastError = declare('flashattn_last_error');

// ---- the case

const lines = fs.readFileSync(path.join(folder, 'cases.txt'), 'utf8')
  .split('case causal\n')[1].split('\n\n')[0].split('\n').map((line) => line.split(' '));
const blob = fs.readFileSync(path.join(folder, 'cases.bin'));

function numbers(kind) {
  const words = lines.find((line) => line[0] === kind).slice(1);
  return Object.fromEntries(words.map((word) => word.split('=')).map(([k, v]) => [k, Number(v)]));
}

function array(name) {
  const [, , dtype, dims, offset, tolerance] = lines.find((line) => line[1] === name);
  const count = dims.split(',').reduce((product, n) => product * Number(n), 1);
  const Type = dtype === 'f32' ? Float32Array : Float64Array;
  const bytes = blob.subarray(Number(offset), Number(offset) + count * Type.BYTES_PER_ELEMENT);
  return { values: new Type(new Uint8Array(bytes).buffer), tolerance: Number(tolerance) };
}

// ---- the call

// Koffi reads every member: what is not said is zero.
function zeroed(name, values) {
  const blank = koffi.decode(Buffer.alloc(koffi.sizeof(structs[name])), structs[name]);
  return Object.assign(blank, values);
}

function check(status) {
  if (status !== 0) throw new Error(lastError(null, null));
}

const expected = { o: array('o'), lse: array('lse') };
const got = {};
for (const name of ['o', 'lse']) {
  got[name] = new Float32Array(expected[name].values.length).fill(NaN);
}
const args = {};
check(argsInit(args, koffi.sizeof(structs.flashattn_args)));
Object.assign(args, numbers('args'), { lse: got.lse });
args.o.data = got.o;
for (const name of ['q', 'k', 'v']) args[name].data = array(name).values;

const desc = zeroed('flashattn_desc', {
  ...numbers('desc'), struct_size: koffi.sizeof(structs.flashattn_desc),
});
const plan = [null];
const bytes = [0];
check(planCreate(desc, plan, null));
check(workspaceSize(plan[0], 1, args, bytes));
check(forward(plan[0], args, Buffer.alloc(Number(bytes[0]) + 1), bytes[0], null));
planDestroy(plan[0]);

let passed = 0;
let failed = 0;
for (const name of ['o', 'lse']) {
  const { values, tolerance } = expected[name];
  values.forEach((value, n) => {
    if (Math.abs(got[name][n] - value) <= tolerance) passed += 1;
    else failed += 1;
  });
}
console.log(`${passed} passed, ${failed} failed, 0 skipped`);
process.exit(failed > 0 ? 1 : 0);
