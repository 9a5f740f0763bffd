// Check that the site's search finds the right page first, with the theme's own search worker.
//
//     node scripts/check_search.mjs [site] [query ...]
//
// Without queries it checks those below, and exits with 1 if another page comes first.

import { readFileSync, readdirSync } from "node:fs"
import { join } from "node:path"
import { createContext, runInContext } from "node:vm"

const FIRST = {
  "own dataset": "tasks.html",
  "out of memory": "plan.html",
  "peft": "tutorials/lora.html",
  "slerp": "mergers.html",
  "cuda": "devices.html",
  "mergekit": "tutorials/mergekit.html",
  "resume": "resume.html",
  "ridge_lambda": "configuration.html",
  "install": "install.html",
}
const SETUP = 0
const QUERY = 2

const [site = "site", ...queries] = process.argv.slice(2)
const workers = join(site, "assets", "javascripts", "workers")
const worker = readdirSync(workers).find(name => /^search\..*\.js$/.test(name))
const answers = []
let receive
const scope = {
  console: { ...console, warn: () => {} },
  addEventListener: (_, listener) => { receive = listener },
  postMessage: message => answers.push(message),
}
scope.self = scope
runInContext(readFileSync(join(workers, worker), "utf-8"), createContext(scope))

async function ask(type, data) {
  await receive({ data: { type, data } })
  return answers.pop().data
}

const index = JSON.parse(readFileSync(join(site, "search", "search_index.json"), "utf-8"))
await ask(SETUP, { ...index, options: { suggest: false } })
let failures = 0
for (const query of queries.length ? queries : Object.keys(FIRST)) {
  const { items } = await ask(QUERY, query)
  const pages = items.map(([item]) => item.location.split("#")[0])
  const right = queries.length || pages[0] === FIRST[query]
  failures += right ? 0 : 1
  console.log(`${right ? "" : "WRONG "}${query}: ${pages.slice(0, 4).join(", ")}`)
}
process.exit(failures ? 1 : 0)
