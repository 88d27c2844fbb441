// A request as a program.
import { hasKey } from "./api.js";

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function python(chat, body) {
  const key = hasKey() ? 'os.environ["LMLIB_API_KEY"]' : '"none"';
  const message = ({ role, content }) =>
    `        {"role": ${JSON.stringify(role)}, "content": ${JSON.stringify(content)}},\n`;
  const text = (value) =>
    Array.isArray(value) ? `[\n${value.map(message).join("")}    ]` : JSON.stringify(value);
  const fields = Object.entries(body).map(([name, value]) => `    ${name}=${text(value)},`);
  return [
    ...(hasKey() ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${location.origin}/v1", api_key=${key})`,
    `answer = client.${chat ? "chat.completions" : "completions"}.create(`,
    ...fields,
    ")",
    `print(answer.choices[0].${chat ? "message.content" : "text"})`,
  ].join("\n");
}

export function curl(chat, body) {
  const path = chat ? "/v1/chat/completions" : "/v1/completions";
  const key = hasKey() ? ['  -H "Authorization: Bearer $LMLIB_API_KEY" \\'] : [];
  return [
    `curl ${location.origin}${path} \\`,
    '  -H "Content-Type: application/json" \\',
    ...key,
    `  -d ${quoted(JSON.stringify(body))}`,
  ].join("\n");
}
