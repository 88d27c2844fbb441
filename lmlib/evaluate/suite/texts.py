"""Texts of several kinds, written for this suite.

Results are compared over time, so a changed text is a new measurement and needs a new name.
"""

PROSE = """\
The ferry left the north shore a little before seven, when the fog still lay on the water and
the bell on the breakwater could be heard but not seen. There were nine passengers that morning.
Most of them had made the crossing so often that they no longer looked up; they sat below with
their coats buttoned and their cups of tea between their hands, and talked about the price of
feed. Only Marta stood at the rail. She had not been to the island since she was eleven years
old, and she wanted to see it come out of the fog.

Her grandfather had kept the light there for thirty years. He was a quiet man who repaired
clocks in the evenings, and he had taught her the names of the winds before he taught her to
read. When he died the house was let to a schoolteacher, and then to nobody. A letter had come
in March. The roof, it said, would not last another winter, and there were some boxes in the
loft which the council did not like to throw away without asking the family first.

"You'll be the granddaughter," said the captain, when they were halfway across. He had come out
to look at the weather, which did not need looking at.

"I am. Did you know him?"

"Everybody knew him. He mended my father's watch, and when my father wanted to pay him he asked
for two dozen eggs instead. A week later he gave the eggs to the widow at the forge, because he
said he had been overpaid." The captain laughed. "We never did find out whether he liked eggs."

The fog thinned. First there was only a darker place in the grey, then a line, then the tower
itself, white once and now the colour of old bread. Marta counted the windows as she had done
when she was small, from the bottom to the top: one, two, three, and the little round one under
the lamp, where a child could sit with a blanket and watch the ships go by. Somebody had put a
board across it.

On the quay a boy was waiting with a handcart. He asked her name, wrote it carefully into a
notebook, and told her that the path had been washed out in the storms and that they would have
to go round by the chapel. It took them most of an hour. The door of the house was stiff, as it
had always been, and she knew without thinking that one had to lift it and push at the same
moment. Inside it smelled of salt and lamp oil. The boxes stood under the window where the
council had left them, eleven of them, each with a date on its lid in her grandfather's narrow
hand; and on the last one, below the date, stood her own name.
"""

CODE = '''\
"""A small store of appointments: add them, find the free hours of a day, save them to a file."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


class Overlap(ValueError):
    """Two appointments would take place at the same time."""


@dataclass(frozen=True, order=True)
class Appointment:
    start: int  # minutes after midnight
    end: int
    title: str = field(compare=False)

    def __post_init__(self):
        if not 0 <= self.start < self.end <= 24 * 60:
            raise ValueError(f"an appointment cannot last from {self.start} to {self.end}")

    def overlaps(self, other):
        return self.start < other.end and other.start < self.end


class Day:
    def __init__(self, appointments=()):
        self._appointments = []
        for appointment in appointments:
            self.add(appointment)

    def __len__(self):
        return len(self._appointments)

    def __iter__(self):
        return iter(sorted(self._appointments))

    def add(self, appointment):
        for other in self._appointments:
            if appointment.overlaps(other):
                raise Overlap(f"{appointment.title!r} overlaps with {other.title!r}")
        self._appointments.append(appointment)

    def remove(self, title):
        before = len(self._appointments)
        self._appointments = [each for each in self._appointments if each.title != title]
        return before - len(self._appointments)

    def free(self, first=8 * 60, last=18 * 60, shortest=30):
        """Yields (start, end) for each gap of at least `shortest` minutes."""
        start = first
        for appointment in self:
            if appointment.start - start >= shortest:
                yield start, appointment.start
            start = max(start, appointment.end)
        if last - start >= shortest:
            yield start, last

    def save(self, path):
        rows = [asdict(appointment) for appointment in self]
        Path(path).write_text(json.dumps(rows, indent=2), encoding="utf-8")

    @classmethod
    def load(cls, path):
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(Appointment(**row) for row in rows)


def clock(minutes):
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


def main():
    day = Day()
    day.add(Appointment(9 * 60, 10 * 60, "dentist"))
    day.add(Appointment(13 * 60, 14 * 60 + 30, "lunch with Ruth"))
    try:
        day.add(Appointment(14 * 60, 15 * 60, "call the bank"))
    except Overlap as error:
        print("sorry:", error)
    for start, end in day.free():
        print(f"free from {clock(start)} to {clock(end)}")


if __name__ == "__main__":
    main()
'''

LANGUAGES = """\
Jeden Morgen um halb sieben öffnet Herr Brandt die Bäckerei am Marktplatz. Im Winter ist es dann
noch dunkel, und die ersten Kunden erkennt er an ihren Schritten. Frau Öztürk kauft immer vier
Brötchen und fragt nach dem Wetter; der Briefträger nimmt ein Stück Kuchen mit, obwohl er es
nicht soll. Wenn die Schule beginnt, wird es für eine Weile still, und er setzt sich mit einer
Tasse Kaffee ans Fenster.

Au bout du village, là où la route devient un chemin, il y avait une maison aux volets bleus.
Personne n'y habitait depuis des années, mais chaque printemps le jardin se remplissait de
tulipes, comme si quelqu'un les avait plantées la veille. Les enfants disaient que c'était une
fée; leur grand-mère, qui avait la clé de la grille dans la poche de son tablier, ne disait rien
du tout.

El tren de las ocho llegó con veinte minutos de retraso. En el andén hacía frío, y la gente
caminaba de un lado a otro para entrar en calor. Una niña con un abrigo rojo preguntó si el mar
estaba muy lejos. «Todavía no se ve», contestó su padre, «pero si cierras los ojos ya se puede
oír». Ella los cerró enseguida y sonrió, porque era verdad.

В маленьком городе у реки все знали друг друга. Летом дети купались до самого вечера, а старики
сидели на скамейке под липой и спорили о том, какой будет урожай. Однажды вода поднялась так
высоко, что мост пришлось закрыть на три дня. Тогда почту возили на лодке, и почтальон говорил,
что это была лучшая неделя в его жизни.

Her sabah deniz kıyısında yürüyen yaşlı adam, dalgaların getirdiği küçük taşları toplardı. Eve
dönünce onları pencerenin önüne dizer, renklerine göre ayırırdı. Torunu bir gün bu taşların ne
işe yaradığını sordu. Adam biraz düşündü ve güldü: hiçbir işe yaramazlar, dedi, ama her biri
bana bir günü hatırlatır.

山のふもとに小さな駅があります。列車は一日に四本しか来ません。駅長さんは毎朝ホームを掃いて、花に水を
やります。夏になると、遠くの町から子どもたちがやって来て、川で魚をとります。最後の列車が出たあと、駅は
とても静かになり、聞こえるのは水の音だけです。

村子東邊有一棵很老的樹，誰也不知道它有多少歲。夏天的晚上，大人坐在樹下喝茶，孩子們聽他們講從前的故事。
有一年颳大風，一根樹枝掉下來，正好落在井邊。村長說，這棵樹在提醒我們，該修井了。
"""

MARKUP = """\
<!DOCTYPE html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <title>Garden club: spring meeting</title>
  <link rel="stylesheet" href="/style/main.css">
  <style>
    table { border-collapse: collapse; width: 100%; }
    th, td { border: 1px solid #ccc; padding: 4px 8px; text-align: left; }
    .late { color: #a33; font-weight: bold; }
  </style>
</head>
<body>
  <header>
    <h1>Spring meeting</h1>
    <nav>
      <ul>
        <li><a href="/index.html">Home</a></li>
        <li><a href="/meetings/index.html">Meetings</a></li>
        <li><a href="/plants/index.html">Plants</a></li>
      </ul>
    </nav>
  </header>
  <main>
    <p>We meet on <time datetime="2031-04-12">Saturday, 12 April</time>, at the old school.
       Please bring <em>seeds to swap</em> and, if you can, a cake.</p>
    <table>
      <thead>
        <tr><th>Time</th><th>Subject</th><th>Speaker</th></tr>
      </thead>
      <tbody>
        <tr><td>10:00</td><td>Welcome</td><td>A. Novak</td></tr>
        <tr><td>10:15</td><td>Soil and compost</td><td>B. Larsen</td></tr>
        <tr><td>11:00</td><td>Roses without sprays</td><td>C. Adeyemi</td></tr>
        <tr class="late"><td>12:30</td><td>Lunch and seed swap</td><td>everybody</td></tr>
      </tbody>
    </table>
    <form action="/meetings/sign-up" method="post">
      <label for="name">Name</label>
      <input id="name" name="name" type="text" required>
      <label for="guests">Guests</label>
      <input id="guests" name="guests" type="number" min="0" max="4" value="0">
      <button type="submit">Sign up</button>
    </form>
  </main>
  <footer>
    <p>&copy; 2031 The garden club &middot; <a href="mailto:club@example.org">write to us</a></p>
  </footer>
</body>
</html>

# Notes of the last meeting

- **Present:** 23 members, 2 guests
- The *hedge along the lane* is to be cut in **June**, not in May: there are nests in it.
- Costs so far:

| what      | how many | price |
|-----------|---------:|------:|
| trowels   |        6 | 41.40 |
| seed trays|       20 | 35.00 |
| sign      |        1 | 12.75 |

1. Write to the council about the water tap.
2. Ask `treasurer@example.org` for the receipts.
3. See [the plan of the beds](https://example.org/plan.pdf) before the next meeting.

```json
{"meeting": 14, "date": "2031-04-12", "place": {"name": "old school", "seats": 60}, "open": true}
```
"""


def _numbers() -> str:
    """Returns powers, prices, sums and products."""
    lines = ["number,square,cube,double"]
    lines += [f"{n},{n**2},{n**3},{2 * n}" for n in range(11, 41)]
    lines += ["", "date        opening  closing  change"]
    opening = 10_000
    for day in range(1, 29):
        change = day**2 * 37 % 211 - 100
        closing = opening + change
        prices = f"{opening / 100:7.2f}  {closing / 100:7.2f}  {change / 100:+.2f}"
        lines.append(f"2029-02-{day:02d}  {prices}")
        opening = closing
    lines.append("")
    for a in range(17, 45):
        b = 144 - 3 * a
        lines.append(f"{a} + {b} = {a + b}; {a} * {b} = {a * b}")
    return "\n".join([*lines, ""])


TEXTS = {
    "prose": PROSE,
    "code": CODE,
    "numbers": _numbers(),
    "languages": LANGUAGES,
    "markup": MARKUP,
}
